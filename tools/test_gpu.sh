#!/bin/bash
# The CUDA suite in parts side by side on one machine, for make test-gpu.
#   tools/test_gpu.sh PYTHON SITE LOGS PARTS [PYTEST ARGUMENTS...]
# PYTHON: an interpreter with a CUDA torch and pytest. SITE: the package, as make site lays it out. LOGS: a folder for
# the output of each part, part-1.log and so on. Prints each part's last line as it ends, and what failed at the end;
# exits with 1 if anything failed. The random programs are a part of their own, and the programs of fit are four: they
# take longest. So are the tests that destroy streams: in their process PyTorch may fail later, as it gives back memory
# of such a stream. So are those that count the threads and the bytes of their process, which compilers in the same
# process change. The tests that take the rest of the device away run last and alone, since others would run out of
# memory beside them.
set -u
python=$1 site=$2 logs=$3 parts=$4
shift 4
mkdir -p "$logs"
rm -f "$logs"/part-*
export PYTHONPATH=$site TORCHOFFLOAD_REQUIRE_CUDA=1

find tests -name 'test_*.py' ! -path 'tests/gradients/test_programs.py' ! -path 'tests/cuda/test_cuda_streams.py' \
  ! -path 'tests/cuda/test_cuda_growth.py' ! -path 'tests/cuda/test_fit_cuda.py' ! -path 'tests/fit/test_programs_*.py' \
  | LC_ALL=C sort \
  | awk -v parts="$parts" -v logs="$logs" '{ print > (logs "/part-" (NR % parts + 1) ".files") }'
echo tests/gradients/test_programs.py > "$logs/part-programs.files"
echo tests/cuda/test_cuda_streams.py > "$logs/part-streams.files"
echo tests/cuda/test_cuda_growth.py > "$logs/part-growth.files"
for share in 1 2 3 4; do ls tests/fit/test_programs_*.py > "$logs/part-fit-programs-$share.files"; done

run_part() {
  local files=$1 part log
  part=$(basename "$files" .files)
  log=$logs/$part.log
  case $part in part-fit-programs-*) local -x TORCHOFFLOAD_TEST_SHARE=${part##*-}/4 ;; esac
  # shellcheck disable=SC2046  # a list of files
  "$python" -m pytest $(cat "$files") -m cuda -rf -p no:cacheprovider --basetemp="$logs/$part.tmp" "${@:2}" > "$log" 2>&1
  local code=$?
  rm -rf "$logs/$part.tmp"
  echo "$part: $(tail -n 1 "$log")"
  [ $code -eq 0 ] || [ $code -eq 5 ] || echo "$part" >> "$logs/part-failures"  # 5: the part has no such test
}

for files in "$logs"/part-*.files; do run_part "$files" "$@" & done
wait
echo tests/cuda/test_fit_cuda.py > "$logs/part-alone.files"
run_part "$logs/part-alone.files" "$@"
[ -e "$logs/part-failures" ] || exit 0
grep -ah '^FAILED\|^ERROR' "$logs"/part-*.log
exit 1
