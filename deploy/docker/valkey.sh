#!/bin/sh
# Valkey of deploy/docker-compose.yml: its users, with the passwords of files (secrets: redis_<role>) in the
# places of change-me-<role>. The configuration goes in by standard input, and nothing but the shell itself
# handles passwords, as command lines can be read by anybody.
set -eu

users() {
  while IFS= read -r line; do
    case $line in
      *">change-me-"*)
        rest=${line#*>change-me-}
        role=${rest%% *}
        file=${SECRETS:-/run/secrets}/redis_$role
        password=
        IFS= read -r password <"$file" || [ -n "$password" ] || {
          echo "$file: no password; run deploy/make_env.sh" >&2
          exit 1
        }
        printf '%s>%s %s\n' "${line%%>change-me-*}" "$password" "${rest#* }"
        ;;
      *) printf '%s\n' "$line" ;;
    esac
  done <"${USERS_FILE:-/etc/epdflow/users.conf}"
}

users=$(users) # a missing password ends the script here
exec valkey-server - "$@" <<CONFIG
$users
maxmemory $MAXMEMORY
maxmemory-policy noeviction
save ""
appendonly no
dir /tmp
CONFIG
