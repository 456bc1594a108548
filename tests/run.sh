#!/usr/bin/env bash
# All parts of the tests, each to its end whatever fails before: the serial one, which mostly waits for programs to
# start, beside those under the launcher, one number of ranks after the other.
#
#   MPIEXEC="mpiexec" LIMIT_S=1800 tests/run.sh PYTHON "1 2 3 4" PYTEST_ARGS...
#
# SAMPLE=K runs one test in K of those that run in full at another size, or on another stack (tests/conftest.py).
set -uo pipefail
# ranks, and the hundreds of short programs that tests start, need not compile every module again
unset PYTHONDONTWRITEBYTECODE
python=$1 sizes=$2
shift 2
read -ra launcher <<<"$MPIEXEC"
logs=$(mktemp --directory)
declare -A codes

# in the group of whoever guards make itself, so that its signal arrives here
guarded() { timeout --foreground --kill-after=20 "$LIMIT_S" "$@"; }

guarded "$python" -m pytest --sample "${SAMPLE:-1}" "$@" >"$logs/serial" 2>&1 &
serial=$!
for size in $sizes; do
    echo "== $size ranks"
    codes[$size]=0
    guarded "${launcher[@]}" -n "$size" "$python" -m pytest --ranks "$size" --sample "${SAMPLE:-1}" "$@" 2>&1 |
        tee "$logs/$size" || codes[$size]=$?
done
codes[serial]=0
wait "$serial" || codes[serial]=$?
echo "== serial"
cat "$logs/serial"

# 5 is "no test selected": no failure where another part has some
status=5
for part in serial $sizes; do
    case ${codes[$part]} in
        0) [ "$status" -ne 5 ] || status=0 ;;
        5) ;;
        *)
            echo "== failed (${codes[$part]}): $part"
            grep -aE '^.{0,9}(FAILED|ERROR)|^seed of order' "$logs/$part"
            status=1
            ;;
    esac
done
rm -r "$logs"
exit "$status"
