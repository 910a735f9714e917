#!/usr/bin/env bash
# Builds the CPU image and runs it as a cluster would, without a Docker engine and without a registry:
#   apt-get install buildah podman runc conmon catatonit mmdebstrap
#   tools/check_image.sh FOLDER MODEL.gguf      (as root; FOLDER keeps base, layers and logs; about 5 GB)
# The base is Debian by mmdebstrap in place of the registry's. PIP_CONF names a pip.conf for the build, CPU_INDEX an
# index for torch, BUILD_VOLUMES more `--volume` arguments, POD_VALUES a file with more values of the chart. Needs the
# project's own environment (`make` makes it) to render the chart.
set -euo pipefail

folder=$(mkdir -p "$1" && cd "$1" && pwd)
model=$(realpath "$2")
root=$(cd "$(dirname "$0")/.." && pwd)
image=localhost/slipstream:0.1.0-cpu
port=50951
store=(--root "$folder/storage" --runroot "$folder/run")
export CONTAINERS_CONF=$folder/containers.conf

say() { printf '== %s\n' "$*"; }
podman_() { podman "${store[@]}" "$@"; }
probe() { podman_ exec "$1" python3 -m tools.health_probe "127.0.0.1:$port" "${2-readiness}"; }
expect() { # expect WHAT GOT WANTED
  [[ $2 == "$3" ]] || { say "$1: got '$2', expected '$3'"; exit 1; }
  say "$1: $2"
}

make_base() {
  ! buildah "${store[@]}" inspect localhost/debian:bookworm >/dev/null 2>&1 || return 0
  [[ -s $folder/rootfs.tar ]] || mmdebstrap --variant=minbase --include=ca-certificates bookworm "$folder/rootfs.tar"
  local container
  container=$(buildah "${store[@]}" from scratch)
  buildah "${store[@]}" add "$container" "$folder/rootfs.tar" /
  buildah "${store[@]}" commit "$container" localhost/debian:bookworm
  buildah "${store[@]}" rm "$container"
}

build() {
  local secret=()
  [[ -z ${PIP_CONF-} ]] || secret=(--secret "id=pip.conf,src=$PIP_CONF")
  # shellcheck disable=SC2086
  buildah "${store[@]}" bud --isolation chroot --network host --pull-never --format docker --layers \
    "${secret[@]}" ${BUILD_VOLUMES-} ${CPU_INDEX:+--build-arg CPU_INDEX=$CPU_INDEX} \
    --build-arg VARIANT=cpu --build-arg BASE=localhost/debian:bookworm -t "$image" "$root"
}

start() { # start NAME: read-only, no capabilities, no new privileges
  podman_ run -d --name "$1" --network host --no-hosts --no-healthcheck --read-only --tmpfs /tmp --cap-drop all \
    --security-opt no-new-privileges --memory 4g --pids-limit 256 --volume "$model:/models/model.gguf:ro" "$image" \
    serve --model /models/model.gguf --port "$port" --metrics-port 0 --num-threads 1 --kv-cache-memory 512MiB \
    --host 127.0.0.1 --speculator ngram,k=4 >/dev/null
  wait_until_serving "$1"
}

wait_until_serving() { # wait_until_serving CONTAINER
  for _ in $(seq 120); do
    [[ $(podman_ inspect --format '{{.State.Running}}' "$1") == true ]] || break
    [[ $(probe "$1" 2>&1 || true) == SERVING ]] && return
    sleep 1
  done
  podman_ logs "$1"
  say "not serving"
  exit 1
}

check_container() {
  expect "user" "$(podman_ exec server id -u)" 10001
  expect "capabilities" "$(podman_ exec server sh -c "grep CapEff /proc/1/status | cut -f2")" 0000000000000000
  expect "root is read-only" "$(podman_ exec server sh -c 'touch /x 2>/dev/null && echo no || echo yes')" yes
  expect "health command" "$(probe server)" SERVING
  expect "liveness" "$(probe server liveness)" SERVING
  local text
  text=$(podman_ exec server slipstream generate "Why is the sky blue?" --address "127.0.0.1:$port" --max-tokens 24)
  [[ -n $text ]] || { say "no text came"; exit 1; }
  say "generated: $text"
}

check_drain() { # a stream that runs when SIGTERM comes ends whole, and the server exits with 0
  podman_ exec server slipstream generate "Count to one hundred." --address "127.0.0.1:$port" --max-tokens 64 \
    --json >"$folder/stream.jsonl" &
  local client=$!
  while [[ $(wc -l <"$folder/stream.jsonl") -lt 5 ]]; do sleep 0.1; done
  podman_ kill --signal TERM server >/dev/null
  expect "health while draining" "$(probe server || true)" NOT_SERVING
  wait "$client"
  expect "finished messages" "$(grep -c '"finished"' "$folder/stream.jsonl")" 1
  expect "exit status" "$(podman_ wait server)" 0
}

check_pod() { # the pod that the chart renders with its default model, and its end within its time
  local pod=$folder/pod.yaml values=$folder/pod-values.yaml
  cat >"$values" <<YAML
image: {repository: localhost/slipstream, tag: 0.1.0-cpu, pullPolicy: Never}
drain: {preStopSeconds: 0, delaySeconds: 1, graceSeconds: 30}
server: {num-threads: 1, kv-cache-memory: 512MiB}
extraArgs: [--host=127.0.0.1, --port=$port, --metrics-port=0]
YAML
  (cd "$root" && .venv/bin/python -m tools.podman_pod --values "$values" ${POD_VALUES:+--values "$POD_VALUES"}) >"$pod"
  podman_ kube down "$pod" >/dev/null 2>&1 || true
  podman_ kube play --no-hosts "$pod" >/dev/null
  wait_until_serving slipstream-server
  expect "user in the pod" "$(podman_ exec slipstream-server id -u)" 10001
  local text
  text=$(podman_ exec slipstream-server slipstream generate "Hello!" --address "127.0.0.1:$port" --max-tokens 8)
  [[ -n $text ]] || { say "no text came from the pod"; exit 1; }
  say "generated in the pod: $text"
  podman_ pod stop --time 46 slipstream >/dev/null
  expect "exit status in the pod" "$(podman_ inspect --format '{{.State.ExitCode}}' slipstream-server)" 0
  podman_ kube down "$pod" >/dev/null
}

cat >"$CONTAINERS_CONF" <<'CONF'
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=1000:1000"]
log_driver = "k8s-file"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
CONF

say "base"; make_base
say "build"; build
podman_ rm -f server >/dev/null 2>&1 || true
say "run"; start server
check_container
check_drain
podman_ rm server >/dev/null
say "pod"; check_pod
say "all good"
