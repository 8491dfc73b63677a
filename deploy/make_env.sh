#!/bin/sh
# Writes deploy/.env from deploy/.env.example, with a random password in the place of each change-me.
# One that is there is left alone.
set -eu
umask 077
cd "$(dirname "$0")"
if [ -e .env ]; then
  echo "deploy/.env is there already; remove it to have new passwords" >&2
  exit 1
fi
while IFS= read -r line; do
  case $line in
    [!#]*=change-me)
      password=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
      printf '%s%s\n' "${line%change-me}" "$password"
      ;;
    *) printf '%s\n' "$line" ;;
  esac
done <.env.example >.env.new
mv .env.new .env
echo "wrote deploy/.env"
