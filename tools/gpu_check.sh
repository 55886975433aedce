#!/usr/bin/env bash
# What CI without a GPU cannot show: builds for the torch of PYTHON, and runs the CUDA suite (its core cases under other
# allocators too), core cases and 50 random programs under compute-sanitizer, 3,000 random programs, a soak, and both examples.
#   OUT=results tools/gpu_check.sh [extra pytest arguments]
# Prints little; the logs, tables and pictures go to OUT.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu-results}
mkdir -p "$OUT"
status=0

step() {  # step NAME COMMAND...: the last lines of its log are printed, all of it is kept
  local name=$1 began=$SECONDS
  shift
  if "$@" > "$OUT/$name.log" 2>&1; then echo "== $name: passed in $((SECONDS - began)) s"
  else echo "== $name: FAILED ($?) in $((SECONDS - began)) s"; status=1; fi
  tail -n "${TAIL:-3}" "$OUT/$name.log"
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
export PYTHONPATH="$PWD/build/gpu" PYTHONUNBUFFERED=1
step build make site OUT=build/gpu PYTHON="$PYTHON"
TAIL=30 step info "$PYTHON" -m torchoffload.info
TAIL=40 step suite make test-gpu PYTHON="$PYTHON" PYTEST_ARGS="-q -rfE --durations=5 --timeout=120 $*"
export TORCHOFFLOAD_REQUIRE_CUDA=1
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
step memcheck "$sanitizer" --tool memcheck --error-exitcode 3 "$PYTHON" -m pytest -m cuda -q \
  tests/test_gradients_order.py -k "several_steps or two_forwards"
export TORCHOFFLOAD_TESTING=1
# Without backtraces: to write one down the tool takes Python's lock inside the driver's, and another thread may have it.
step memcheck-programs "$sanitizer" --tool memcheck --error-exitcode 3 --show-backtrace no --target-processes all "$PYTHON" \
  tests/fuzz_programs.py --device cuda --programs 50 --jobs 1
TAIL=8 step programs "$PYTHON" tests/fuzz_programs.py --device cuda --programs 3000 --out "$OUT/programs.json"
unset TORCHOFFLOAD_TESTING
TAIL=12 step soak "$PYTHON" tests/soak.py --device cuda --steps 3000
TAIL=12 step train_gpt "$PYTHON" examples/train_gpt.py --out "$OUT/train_gpt.png"
TAIL=12 step train_llama "$PYTHON" examples/train_llama.py --out "$OUT/train_llama.png"
exit $status
