#!/bin/bash
# This build of torchoffload beside another one, in turns on one GPU: benchmarks/compare_builds.sh SITE OTHER_SITE [WORKLOAD...]
#
# SITE, OTHER_SITE: directories with the package, as `make site OUT=...` lays it out and PYTHONPATH takes it. Both builds run
# under the scripts of this checkout, so the other one has to know the options that these use.
#   OUT       where the JSON files and run.log go (build/compared)
#   PYTHON    an interpreter with torch and transformers (python3)
#   ROUNDS    of processes of each build in hooks.py (3)
#
# The hooks in a hot loop, the hooks in a whole small step (twice each), and then a step of each workload (none by default).
# About, on an H200: hooks 70 s, hooks in a step 70 s, a workload 35 to 60 s a build. What is printed is printed at once,
# so a run that is cut short keeps what it has.
set -uo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 2 ] || { sed -n '2,13p' "$0"; exit 2; }

site=$(realpath "$1") other=$(realpath "$2")
shift 2
OUT=${OUT:-build/compared}
PYTHON=${PYTHON:-python3}
failed=0
mkdir -p "$OUT"

# turn SITE SCRIPT OPTION...: a script with one build.
turn() {
  echo "== $(basename "$(dirname "$1")")/$(basename "$1"): ${*:2}"
  PYTHONPATH=$1 "$PYTHON" "benchmarks/$2" "${@:3}" 2>> "$OUT/run.log" || failed=1
}

turn "$site" hooks.py --device cuda --count 1000 --rounds "${ROUNDS:-3}" --against "$other" --json "$OUT/hooks.json"
for build in "$site" "$other" "$other" "$site"; do
  turn "$build" hooks_in_step.py --workload A:batch=1,tokens=1024 --repeats 10 --warm-up 6
done
for workload in "$@"; do
  turn "$site" train_step.py --workload "$workload" --turns all --offloader none torchoffload --warm-up 7 --json "$OUT/$workload.json"
  turn "$other" train_step.py --workload "$workload" --turns all --offloader none torchoffload --warm-up 7 \
    --json "$OUT/$workload-other.json"
done
exit $failed
