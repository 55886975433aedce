#!/bin/bash
# What docs/performance.md reports, measured on one GPU: benchmarks/run_all.sh [link] [A] [B] [C] [D]; without any, all.
#
#   OUT       where link.json, train-step-A.json ... and run.log go (build/benchmarks)
#   PYTHON    an interpreter with torch, transformers and torchoffload (python3); see `make site`
#   PEERS     a directory with the wheels of torchtune and trl (build/peers)
#   LIMIT_S   seconds for all parts together (540); a part that is cut short keeps what it has, and one for which too
#             little is left is not begun
#   OTHERS    the peers on every workload ("torchtune trl"); on D transformers' own offload is one more
#   STEPS, WARM_UP    as in train_step.py (5, and 2: with the first offloaded step that is 3)
#
# About, on an H200: link 25 s, A 130, B 105, C 170, D 250. In two runs, then: `link A B`, and `C D`.
set -uo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-build/benchmarks}
PYTHON=${PYTHON:-python3}
PEERS=${PEERS:-build/peers}
LIMIT_S=${LIMIT_S:-540}
OTHERS=${OTHERS:-torchtune trl}
STEPS=${STEPS:-5}
WARM_UP=${WARM_UP:-2}
declare -A LEAST_S=([link]=15 [A]=90 [B]=75 [C]=110 [D]=150)
failed=0
mkdir -p "$OUT"
exec 3>> "$OUT/run.log"

# part NAME SCRIPT OPTION...: run it in what time is left. Its table goes to the screen, all else to run.log.
part() {
  local name=$1 script=$2 started=$SECONDS left=$((LIMIT_S - SECONDS)) status
  shift 2
  if [ "$left" -lt "${LEAST_S[$name]}" ]; then
    echo "$name: not begun, $left s left"
    failed=1
    return
  fi
  timeout --kill-after=30 "$left" "$PYTHON" "benchmarks/$script" "$@" 2>&3
  status=$?
  if [ $status -ne 0 ]; then
    failed=1
    echo "$name: $(tail -n 1 "$OUT/run.log" | tr '\r' '\n' | tail -n 1)"
  fi
  echo "$name: status $status, $((SECONDS - started)) s"
}

# train NAME TURNS PEER...: all peers on one workload, and torchoffload again at torchtune's memory.
train() {
  local name=$1 turns=$2 at_memory_of=()
  shift 2
  [[ " $* " == *" torchtune "* ]] && at_memory_of=(--at-memory-of torchtune)
  part "$name" train_step.py --workload "$name" --turns "$turns" --offloader none torchoffload "$@" \
    "${at_memory_of[@]}" --peers "$PEERS" --warm-up "$WARM_UP" --steps "$STEPS" --json "$OUT/train-step-$name.json"
}

[ $# -gt 0 ] || set -- link A B C D
read -r -a others <<< "$OTHERS"
for name in "$@"; do
  case $name in
    link) part link link.py --json "$OUT/link.json" ;;
    # Pairs where the host cannot hold what all offload at once, or the device all caches.
    A | C) train "$name" pairs "${others[@]}" ;;
    B) train B all "${others[@]}" ;;
    D) train D pairs "${others[@]}" transformers ;;
    *) echo "no part $name: choose from link, A, B, C, D"; exit 2 ;;
  esac
done
exit $failed
