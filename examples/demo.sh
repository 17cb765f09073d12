#!/usr/bin/env bash
# Sets up an environment and runs trace-pair on the bundled model. Works on a fresh machine, needs no
# GPU and no model download. The report goes to demo-pair/ in the repository, or demo-pair-2/ and so on
# if that is taken.
#
#   bash examples/demo.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
VENV="${VENV:-$ROOT/.venv}"

prepare_environment ""

out="$ROOT/demo-pair"
number=1
while [ -e "$out" ]; do
    number=$((number + 1))
    out="$ROOT/demo-pair-$number"
done

status=0
"$VENV/bin/trace-pair" --demo --out "$out" || status=$?
# As with diff, 0 is "identical" and 1 "diverged": both are answers. The rest is trouble.
[ "$status" -le 1 ] || exit "$status"
[ -f "$out/report.html" ] || die "trace-pair ended with $status but wrote no $out/report.html"
say "the report is $out/report.html"
