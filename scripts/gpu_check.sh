#!/usr/bin/env bash
# Compare the real FlashMLA kernels with padtrace's reference on this machine's GPU.
#
#   scripts/gpu_check.sh [DIRECTORY_WITH_WHEELS]
#
# Needs no network. Lay the wheels (sgl_flash_mla-*.whl, sglang_kernel-*.whl; torch-*.whl with what
# it needs, if torch is not installed) beside this script or into the directory named. Only the
# FlashMLA part of a wheel is unpacked, into a temporary directory that is removed again.
# PYTHON names the interpreter (default python3).
#
# Prints a short table, and writes it to gpu-check.txt in $OUT or in the current directory.
# Exit code: 0 everything agrees, 1 something differs, 4 no kernel could be called.
set -u

here="$(cd "$(dirname "$0")" && pwd)"
repo="$(dirname "$here")"
wheels="$(cd "${1:-$here}" && pwd)" || exit 2
python="${PYTHON:-python3}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
table="${OUT:-.}/gpu-check.txt"
deadline=$(($(date +%s) + 290))

left() { echo $((deadline - $(date +%s))); }

path="$repo"
if ! "$python" -c 'import torch' 2>/dev/null; then
    "$python" -m pip install --quiet --no-index --find-links "$wheels" --target "$work/torch" torch ||
        { echo "torch is neither installed nor among the wheels in $wheels"; exit 4; }
    path="$path:$work/torch"
fi

unpack() {
    "$python" - "$1" "$2" <<'PYTHON'
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    for name in wheel.namelist():
        own = name.startswith(("flash_mla/", "sgl_kernel/flash_mla.py", "sgl_kernel/flashmla_ops"))
        if own or name.endswith(".dist-info/METADATA"):
            wheel.extract(name, sys.argv[2])
PYTHON
}

verdict=4
compare() {
    timeout "$(left)" env PYTHONPATH="$1" "$python" -m padtrace.replay.kernels.compare
    local code=$?
    case "$code" in
    0) [ "$verdict" = 4 ] && verdict=0 ;;
    4) ;;
    *) verdict=1; [ "$code" = 124 ] && echo "stopped: out of time" ;;
    esac
}

run_all() {
    date -u '+%Y-%m-%d %H:%M UTC'
    command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    local found=0 wheel place
    for wheel in "$wheels"/sgl_flash_mla-*.whl "$wheels"/sglang_kernel-*.whl "$wheels"/sgl_kernel-*.whl; do
        [ -f "$wheel" ] || continue
        found=1
        place="$work/$(basename "$wheel" .whl)"
        echo
        echo "== $(basename "$wheel")"
        unpack "$wheel" "$place" && compare "$place:$path"
    done
    if [ "$found" = 0 ]; then
        echo
        echo "== no wheel in $(basename "$wheels"); the installed packages"
        compare "$path"
    fi
    echo
    case "$verdict" in
    0) echo "everything agrees" ;;
    4) echo "nothing was compared" ;;
    *) echo "something differs" ;;
    esac
    return "$verdict"
}

# A pipe would run the function in a subshell and lose its exit code.
run_all > "$table" 2>&1
code=$?
cat "$table"
exit "$code"
