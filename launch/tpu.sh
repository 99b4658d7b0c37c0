#!/usr/bin/env bash
# Trains on a Cloud TPU pod, a queued resource, and asks for another whenever it is taken
# away, until training is finished; then gives it back.
#
#   NAME=run1 ZONE=us-east5-b TYPE=v6e-64 launch/tpu.sh --config=configs/quickstart.py \
#     --workdir=gs://BUCKET/run1 --config.steps=100000
#
# The arguments go to `python -m mtpjax.train`. Run it from the checkout, whose files (as
# git knows them, edits included) it copies there, on a machine that stays up, in tmux
# say; started again, it goes on with the resource that is there. Needs gcloud with a
# project and a login, and a bucket that the TPU's service account may write.
#
#   SLICES=2   so many slices of TYPE (mesh.replica), 1 by default
#   TIER=      what to ask for: --spot by default, --reserved, or nothing (on demand)
#   RUNTIME=   of the machines; follows from TYPE
#   SETUP=     what installs mtpjax there, in the copied checkout, into .venv
#
# Ctrl-C leaves the resource as it is, and paid for:
#   gcloud compute tpus queued-resources delete NAME --zone=ZONE --force
#
# Exit codes of train: 0 it is finished, 2 a mistake, which another try would repeat; both
# end this script. After any other, such as 143 after SIGTERM, training goes on.

set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 2
}

for needed in NAME ZONE TYPE; do
  [[ -n ${!needed:-} ]] || fail "$needed is not set; see the head of $0"
done
[[ " $*" == *' --workdir=gs://'* ]] ||
  fail "--workdir must be a bucket, gs://BUCKET/NAME: the disks go with the machines"
case $TYPE in
  v6e-*) runtime=v2-alpha-tpuv6e ;;
  v5p-*) runtime=v2-alpha-tpuv5 ;;
  v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
  v4-*) runtime=tpu-ubuntu2204-base ;;
  *) runtime=${RUNTIME:?"is not known for TYPE=$TYPE: set it"} ;;
esac
nodes=(--node-id="$NAME")
if ((${SLICES:-1} > 1)); then
  nodes=(--node-count="$SLICES" --node-prefix="$NAME")
fi
read -ra tier <<<"${TIER---spot}"
setup=${SETUP:-"python3 -m pip install --quiet --user uv &&
  python3 -m uv venv --quiet --allow-existing --python=3.12 .venv &&
  python3 -m uv pip install --quiet --python=.venv/bin/python -e '.[tpu,gcs]'"}

qr() { gcloud compute tpus queued-resources "$@" --zone="$ZONE" --quiet; }

everywhere() { # a command, on all machines at once
  qr ssh "$NAME" --node=all --worker=all --batch-size=all --command="$1"
}

state() { # nothing, if there is no such resource
  qr list --filter="name~/queuedResources/$NAME\$" --format='value(state.state)'
}

create() {
  qr create "$NAME" "${nodes[@]}" --accelerator-type="$TYPE" \
    --runtime-version="${RUNTIME:-$runtime}" "${tier[@]}"
}

install() {
  local files
  files=$(mktemp -d)
  git ls-files -z --cached --others --exclude-standard |
    tar --create --gzip --null --files-from=- --file="$files/mtpjax.tgz" &&
    # What a broken connection may have left there still holds the chips.
    everywhere "pkill -KILL -f '[m]tpjax.train'; rm -rf mtpjax; mkdir mtpjax" &&
    qr scp "$files/mtpjax.tgz" "$NAME:mtpjax/" --node=all --worker=all --batch-size=all &&
    everywhere "cd mtpjax && tar -xzf mtpjax.tgz && $setup"
  local code=$?
  rm -r "$files"
  return $code
}

train() {
  everywhere "cd mtpjax && exec .venv/bin/python -m mtpjax.train $(printf '%q ' "$@")"
}

created='' before=''
while true; do
  now=$(state) || now='unknown: gcloud failed'
  [[ $now == "$before" ]] || echo "$(date +%T) $NAME: ${now:-none}"
  before=$now
  case $now in
    '')
      if create; then
        created=yes
      elif [[ -z $created ]]; then
        fail "gcloud cannot create $NAME, see above"
      fi
      ;;
    FAILED | SUSPENDED) qr delete "$NAME" --force || true ;;
    ACTIVE)
      code=1
      if install; then
        train "$@" && code=0 || code=$?
      fi
      case $code in
        0 | 2)
          qr delete "$NAME" --force
          exit $code
          ;;
      esac
      echo "$(date +%T) $NAME: ended with code $code, going on"
      ;;
  esac
  sleep "${POLL:-30}"
done
