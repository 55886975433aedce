#!/usr/bin/env bash
# What CI without a GPU cannot show. Builds for the torch of PYTHON, and runs these PARTS, or all of them:
#   suite      the CUDA suite, its core cases under other allocators too; with two GPUs the parallel cases over NCCL,
#              and with the trainers' packages installed those of the integrations
#   memcheck   core cases and 50 random programs under compute-sanitizer
#   programs   3,000 random programs
#   soak       3,000 steps
#   examples   those that compare, with their pictures
#   parallel   with several GPUs: steps under FSDP2, tensor parallelism and a pipeline, bit for bit
# and, only where it is asked for,
#   wheel      those of tests/cuda and tests/gradients, with the core of WHEEL, which `make wheels` has built
#
#   OUT=results PARTS="suite soak" tools/gpu_check.sh [extra pytest arguments]
#
# Prints little; the logs, tables and pictures go to OUT. On an H200 the suite takes about 9 minutes in one process, and
# runs in several; the rest takes as much.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu-results}
PARTS=${PARTS:-suite memcheck programs soak examples parallel}
mkdir -p "$OUT"
status=0

step() {  # step NAME COMMAND...: the last lines of its log are printed, all of it is kept
  local name=$1 began=$SECONDS
  shift
  if "$@" > "$OUT/$name.log" 2>&1; then echo "== $name: passed in $((SECONDS - began)) s"
  else echo "== $name: FAILED ($?) in $((SECONDS - began)) s"; status=1; fi
  tail -n "${TAIL:-3}" "$OUT/$name.log"
}

part_suite() {
  TAIL=40 step suite make test-gpu PYTHON="$PYTHON" PYTEST_ARGS="-q -rfE --durations=5 --timeout=120 $*"
}

part_memcheck() {
  local sanitizer
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  TORCHOFFLOAD_REQUIRE_CUDA=1 step memcheck "$sanitizer" --tool memcheck --error-exitcode 3 "$PYTHON" \
    -m pytest -m cuda -q tests/gradients/test_gradients_order.py -k "several_steps or two_forwards"
  # Without backtraces: to write one down the tool takes Python's lock inside the driver's, and another thread may have it.
  TORCHOFFLOAD_TESTING=1 step memcheck-programs "$sanitizer" --tool memcheck --error-exitcode 3 --show-backtrace no \
    --target-processes all "$PYTHON" tests/support/fuzz_programs.py --device cuda --programs 50 --jobs 1
}

part_programs() {
  TORCHOFFLOAD_TESTING=1 TAIL=8 step programs "$PYTHON" tests/support/fuzz_programs.py --device cuda --programs 3000 \
    --out "$OUT/programs.json"
}

part_soak() { TAIL=12 step soak "$PYTHON" tests/support/soak.py --device cuda --steps 3000; }

part_examples() {
  local example
  for example in train_gpt train_llama; do
    TAIL=12 step "$example" "$PYTHON" "examples/$example.py" --out "$OUT/$example.png"
  done
  for example in minimal with_checkpointing choose_modules; do
    TAIL=12 step "$example" "$PYTHON" "examples/$example.py"
  done
}

part_parallel() {
  local gpus
  gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
  [ "$gpus" -gt 1 ] || { echo "== parallel: left out, one GPU"; return; }
  TAIL=40 step parallel "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$gpus" \
    benchmarks/parallel_step.py --json "$OUT/parallel.json"
}

part_wheel() {
  local site=$PWD/build/gpu-wheel
  rm -rf "$site"
  "$PYTHON" -m zipfile -e "$WHEEL" "$site"
  # The program that says which core it has fails where the wheel has no module for this torch.
  PYTHONPATH="$site" step wheel-info "$PYTHON" -P -m torchoffload.info
  PYTHONPATH="$site" TORCHOFFLOAD_REQUIRE_CUDA=1 TAIL=20 step wheel "$PYTHON" \
    -m pytest tests/cuda tests/gradients -m cuda -q -rfE --timeout=120 -p no:cacheprovider
}

for part in $PARTS; do
  declare -F "part_$part" > /dev/null || { echo "gpu_check.sh: there is no part '$part'"; exit 2; }
done
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
export PYTHONPATH="$PWD/build/gpu" PYTHONUNBUFFERED=1
if [ "$PARTS" != wheel ]; then
  step build make site OUT=build/gpu PYTHON="$PYTHON"
  TAIL=30 step info "$PYTHON" -m torchoffload.info
fi
for part in $PARTS; do "part_$part" "$@"; done
exit $status
