#!/bin/sh
# Writes deploy/.env from deploy/.env.example, and a random password for each user of NATS, Valkey and Grafana into
# deploy/secrets (EPD_SECRETS_DIR). Files that are there are left alone, so a second run makes what is missing.
set -eu
umask 077
cd "$(dirname "$0")"
secrets=./secrets
if [ -e .env ]; then
  secrets=$(sed -n 's/^EPD_SECRETS_DIR=//p' .env | tail -n 1 | tr -d '"')
  if [ -z "$secrets" ]; then
    echo "deploy/.env is there already and does not say where passwords lie: add EPD_SECRETS_DIR=./secrets to it" >&2
    exit 1
  fi
fi
# The folder is this user's alone. The files can be read by all: containers see them as other users.
mkdir -p "$secrets"
made=0
for name in nats_gateway nats_encoder nats_pd nats_client nats_operator \
  redis_gateway redis_encoder redis_pd redis_operator grafana_admin; do
  [ -e "$secrets/$name" ] && continue
  password=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
  rm -f "$secrets/$name.new" # of a run that was ended here
  printf '%s\n' "$password" >"$secrets/$name.new"
  chmod 444 "$secrets/$name.new"
  mv "$secrets/$name.new" "$secrets/$name"
  made=$((made + 1))
done
[ -e "$secrets/hf_token" ] || install -m 444 /dev/null "$secrets/hf_token" # for the profile `gpu`, if you have one
if [ -e .env ]; then
  echo "deploy/.env is there already and stays as it is; $made passwords were missing and are made"
else
  cp .env.example .env.new
  mv .env.new .env
  echo "wrote deploy/.env and deploy/secrets"
fi
