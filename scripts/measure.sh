#!/usr/bin/env bash
# Builds for the GPU at hand, checks every version in every type, times the shapes that the README shows, and leaves what
# was measured in DIR (default: dev/results/<the GPU's name>): NAME.jsonl, one JSON object a run, and run.txt, what one
# run prints. With SANITIZERS=1 the four tools of compute-sanitizer look at every version and type first.
# usage: scripts/measure.sh [DIR]
set -euo pipefail
cd "$(dirname "$0")/.."
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1 | tr 'A-Z ' 'a-z-') || true
[ -n "$gpu" ] || { echo "measure.sh: no GPU: nvidia-smi names none" >&2; exit 3; }
make -s DEVICE=cuda all
dir=${1:-dev/results/$gpu}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# One line a shape: the kernel, then its options.
shapes='
encoder_forward -b 8
encoder_forward -b 8 --tokens zipf
encoder_forward -b 64
encoder_forward -b 64 --tokens zipf
encoder_forward -b 16 -t 4096 -c 4096 -v 128256
encoder_forward -b 16 -t 4096 -c 4096 -v 128256 --tokens zipf
encoder_forward -b 1 -t 65536
encoder_forward -b 64 -c 769
encoder_forward -b 64 --dtype fp32
encoder_forward -b 64 --dtype fp16
'
quietly() {  # COMMAND...: prints what it says only if it fails, and ends the shell then
    log=$("$@" 2>&1) || { echo "$log"; exit 1; }
}
export -f quietly
for dtype in fp32 fp16 bf16; do
    for shape in "-b 8" "-b 5 -t 333 -c 769" "-b 1 -t 1000 -c 100 --tokens zipf" "-b 64 -t 3 -c 7 -v 5 --tokens one"; do
        quietly ./encoder_forward all --check --dtype $dtype $shape
    done
done
if [ -n "${SANITIZERS:-}" ]; then
    for tool in memcheck racecheck initcheck synccheck; do
        for dtype in fp32 fp16 bf16; do
            for shape in "-b 3 -t 17 -c 264 -v 100" "-b 8 -t 5 -c 33 -v 100"; do
                echo "--tool $tool --error-exitcode 9 ./encoder_forward all --check --dtype $dtype $shape"
            done
        done
    done | xargs -P 8 -I {} bash -c 'quietly compute-sanitizer {}'
    echo "compute-sanitizer: memcheck, racecheck, initcheck and synccheck report nothing"
fi
while read -r kernel options; do
    [ -n "$kernel" ] || continue
    echo "$kernel $options"
    ./$kernel all --bench $options --json "$work/$kernel.jsonl" | sed -n '/^version/,$p'
done <<< "$shapes"
./encoder_forward > "$work/run.txt"

mkdir -p "$dir"
mv "$work"/* "$dir"/
