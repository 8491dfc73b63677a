#!/bin/sh
# Writes deploy/.env from deploy/.env.example, and deploy/secrets with a random password for each user of NATS, Valkey
# and Grafana. Files that are there are left alone.
set -eu
umask 077
cd "$(dirname "$0")"
if [ -e .env ]; then
  echo "deploy/.env is there already; remove it, and deploy/secrets to have new passwords" >&2
  exit 1
fi
# The folder is this user's alone. The files can be read by all: containers see them as other users.
mkdir -p secrets
for name in nats_gateway nats_encoder nats_pd nats_client nats_operator \
  redis_gateway redis_encoder redis_pd redis_operator grafana_admin; do
  [ -e "secrets/$name" ] && continue
  password=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
  printf '%s\n' "$password" >"secrets/$name.new"
  chmod 444 "secrets/$name.new"
  mv "secrets/$name.new" "secrets/$name"
done
[ -e secrets/hf_token ] || install -m 444 /dev/null secrets/hf_token # for the profile `gpu`, if you have one
cp .env.example .env.new
mv .env.new .env
echo "wrote deploy/.env and deploy/secrets"
