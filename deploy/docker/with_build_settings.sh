#!/bin/sh
# Runs a build step with the optional build secrets and local wheels; see the Dockerfile.
set -eu
secrets=/run/secrets
if [ -s $secrets/ca_bundle ]; then
  export SSL_CERT_FILE=$secrets/ca_bundle PIP_CERT=$secrets/ca_bundle
fi
if [ -s $secrets/pip_conf ]; then
  export PIP_CONFIG_FILE=$secrets/pip_conf
fi
if ls /wheels/*.whl >/dev/null 2>&1; then
  export PIP_FIND_LINKS=/wheels
fi
exec "$@"
