#!/bin/sh
# NATS of deploy/docker-compose.yml, with the passwords of its users: users.conf names them as variables, and they
# lie in files (secrets). In quotes, or one like 12e3 would be a number. Letters and digits only.
set -eu
for pair in gateway:GATEWAY encoder:ENCODER pd:PD client:CLIENT operator:OPERATOR; do
  role=${pair%:*}
  file=${SECRETS:-/run/secrets}/nats_$role
  password=$(cat "$file") # a missing one ends the script here
  case $password in
    "" | *[!A-Za-z0-9]*)
      echo "$file: a password of letters and digits is needed; run deploy/make_env.sh" >&2
      exit 1
      ;;
  esac
  export "EPD_NATS_${pair#*:}_PASSWORD=\"$password\""
done
exec nats-server "$@"
