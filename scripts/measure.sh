#!/usr/bin/env bash
# Builds for this GPU, checks every version in every type, and times the shapes of the README. Writes the measurements
# to DIR (default: dev/results/<the GPU's name>): KERNEL.jsonl, one JSON object per run, when that kernel is finished;
# run.txt, the output of one run; and sweep.txt, lm_head's times by memory. With SANITIZERS=1 the tools of
# compute-sanitizer first check every version and type. KERNELS="encoder_backward" measures only that kernel.
# usage: scripts/measure.sh [DIR]
set -euo pipefail
cd "$(dirname "$0")/.."
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1 | tr 'A-Z ' 'a-z-') || true
[ -n "$gpu" ] || { echo "measure.sh: no GPU: nvidia-smi names none" >&2; exit 3; }
make -s DEVICE=cuda all
dir=${1:-dev/results/$gpu}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# One line per shape: the kernel, then its options.
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
encoder_backward -b 8
encoder_backward -b 8 --tokens zipf
encoder_backward -b 64
encoder_backward -b 64 --tokens zipf
encoder_backward -b 64 --tokens one
encoder_backward -b 64 --tokens sorted
encoder_backward -b 64 --tokens padded
encoder_backward -b 16 -t 4096 -c 4096 -v 128256
encoder_backward -b 16 -t 4096 -c 4096 -v 128256 --tokens zipf
encoder_backward -b 64 --overwrite
encoder_backward -b 16 -t 4096 -c 4096 -v 128256 --overwrite
encoder_backward -b 16 -t 4096 -c 4096 -v 128256 --overwrite --tokens zipf
encoder_backward -b 512 -c 1024 --tokens zipf
encoder_backward -b 64 -c 256 -v 500000
encoder_backward -b 64 -c 256 -v 2000000
encoder_backward -b 64 --rounding stochastic
encoder_backward -b 64 --grad-dtype fp32
encoder_backward -b 64 --dtype fp32
encoder_backward -b 64 -c 769
embedding_lookup -b 64
embedding_lookup -b 64 --tokens zipf
embedding_lookup -b 64 -c 4096 -v 128256
embedding_lookup -b 64 -c 4096 -v 128256 --tokens zipf
embedding_lookup -b 2 -c 512 -v 1024 --dtype fp32
embedding_lookup -b 2 -c 1024 -v 1024 --dtype fp32
embedding_lookup -b 4 -c 512 -v 1024 --dtype fp32
embedding_lookup -b 4 -c 1024 -v 1024 --dtype fp32
embedding_lookup -b 2 -c 512 -v 1024 --dtype fp16
embedding_lookup -b 2 -c 1024 -v 1024 --dtype fp16
embedding_lookup -b 4 -c 512 -v 1024 --dtype fp16
embedding_lookup -b 4 -c 1024 -v 1024 --dtype fp16
embedding_lookup -b 64 -c 769
embedding_lookup -b 64 --index int64 --out-dtype fp32
embedding_lookup -b 64 -c 256 -v 10000000 --dtype fp16 --bag sum --hotness 64
embedding_lookup -b 64 -c 128 -v 1000000 --dtype fp16 --bag sum --hotness 32
embedding_lookup -b 64 -c 128 -v 1000000 --dtype fp16 --bag sum --hotness 32 --tokens zipf
embedding_lookup -b 64 -c 128 -v 1000000 --dtype fp16 --bag mean --hotness 0..64 --weights
embedding_lookup -b 64 -c 128 -v 1000000 --dtype fp16 --bag max --hotness 32
embedding_lookup -b 1 -t 64 -c 128 -v 1000000 --dtype fp16 --bag sum --hotness 100000
embedding_lookup_backward -v 10000000 --dtype fp16 --grad-dtype fp32 --sparse --tokens zipf
embedding_lookup_backward -v 10000000 --dtype fp16 --grad-dtype fp32 --sparse
embedding_lookup_backward -v 1000000 --dtype fp16 --grad-dtype fp32 --tokens zipf
embedding_lookup_backward -v 1000000 --sparse --tokens one
embedding_lookup_backward -v 1000000 --bag mean --hotness 0..64 --weights --dweights --index int64 --sparse
embedding_lookup_backward -v 1000000 --bag max --sparse
embedding_update -v 10000000 --dtype fp32
embedding_update -v 10000000 --dtype fp32 --distinct
embedding_update -v 100000 --dtype fp32 --tokens zipf
embedding_update -v 10000000 -c 128 --value-dtype fp32 --index int64
embedding_update -v 100000 --dtype fp32 --op accumulate --tokens zipf
embedding_update -v 10000000 --dtype fp32 --op accumulate
embedding_update -v 10000000 --dtype fp32 --op accumulate --distinct
embedding_update -v 100000 --op accumulate --value-dtype fp32 --tokens zipf --rounding stochastic
embedding_update -v 10000000 --dtype fp32 --op sgd
embedding_update -v 10000000 --dtype fp32 --op rowwise-adagrad
embedding_update -v 10000000 -c 128 --op rowwise-adagrad --value-dtype fp32
embedding_update -v 1000000 --dtype fp32 --op adam
embedding_update -v 1000000 --dtype fp32 --op rowwise-adam
classifier_fused -b 8
classifier_fused -v 32000
classifier_fused -b 4 -v 128256
classifier_fused -b 4 -v 151936
classifier_fused -b 4 -v 256000
classifier_fused -b 1 -t 256 -v 128256
classifier_fused -b 64 -v 1000
classifier_fused -b 16 -v 8192
classifier_fused -v 16384
classifier_fused -b 1 -v 700000
classifier_fused -b 1 -v 1000000
classifier_fused -p 50257
classifier_fused --dtype fp32
classifier_fused --dtype fp16
classifier_fused --output other
classifier_fused --output none
classifier_fused --softcap 30
classifier_fused --label-smoothing 0.1
classifier_fused --z-loss 0.0001
classifier_fused --accuracy
classifier_fused --probs
lm_head
lm_head -v 50304
lm_head -v 50304 --memory 10%
lm_head -v 50304 --memory 5%
lm_head -v 50304 --memory 2%
lm_head -v 50304 --memory 2% --graph
lm_head -v 50304 --forward --memory 5%
lm_head -c 2048 -v 128256
lm_head -c 2048 -v 128256 --memory 10%
lm_head -c 2048 -v 128256 --memory 2%
lm_head -c 2048 -v 128256 --forward --memory 5%
lm_head -c 4096 -v 128256
lm_head -c 4096 -v 128256 --memory 10%
lm_head -c 4096 -v 128256 --memory 2%
lm_head -c 2304 -v 256000
lm_head -c 2304 -v 256000 --memory 10%
lm_head -c 2304 -v 256000 --memory 5%
lm_head -c 2304 -v 256000 --memory 2%
lm_head -v 50304 --softcap 30 --memory 5%
lm_head -v 50304 --grad-dtype same
lm_head -v 50304 --gradients dx --memory 10%
lm_head -v 50304 --bias --memory 10%
lm_head -b 4 -v 50304 --dtype fp32 --memory 10%
lm_head -b 4 -v 50304 --dtype fp32 --tf32 --memory 10%
'
# Shapes to check first, in each type.
checks='
encoder_forward -b 8
encoder_forward -b 5 -t 333 -c 769
encoder_forward -b 64 -t 3 -c 7 -v 5 --tokens one
encoder_backward -b 8 --tokens zipf
encoder_backward -b 5 -t 333 -c 769 --tokens padded --overwrite
encoder_backward -b 300 -t 3 -c 40 -v 5 --grad-dtype fp32
embedding_lookup -b 8 --tokens zipf --index int64
embedding_lookup -b 5 -t 333 -c 769 --stride 800 --out-dtype fp32
embedding_lookup -b 2 -t 333 -c 130 --bag mean --hotness 0..40 --weights --padding-idx 3 -v 1000
embedding_lookup -b 1 -t 40 -c 33 --bag max --hotness 0..3000 --tables 3 -v 1000
embedding_lookup_backward -b 2 --tokens zipf --sparse --index int64
embedding_lookup_backward -b 1 -t 333 -c 129 -v 1000 --bag mean --hotness 0..40 --weights --dweights --padding-idx 3
embedding_lookup_backward -b 1 -t 40 -c 33 -v 300 --bag max --hotness 0..1000 --tables 3 --overwrite
embedding_update -b 4 --tokens zipf --index int64
embedding_update -b 1 -t 333 -c 769 --stride 800 --value-dtype fp32
embedding_update -b 2 --op accumulate --tokens padded --scale 0.3 -v 1000
embedding_update -b 1 -t 900 -c 129 --op accumulate --rounding stochastic -v 100
embedding_update -b 2 --op sgd --rounding stochastic --weight-decay 0.1
embedding_update -b 2 -c 100 --op rowwise-adagrad --value-dtype fp32 --weight-decay 0.1
embedding_update -b 2 -c 33 --op adam --stride 40
embedding_update -b 2 --op rowwise-adam --index int64
classifier_fused -b 2 --logits peaked --lse
classifier_fused -b 5 -t 33 -v 1003 -p 1003 --output other --probs --accuracy --label-smoothing 0.1
classifier_fused -b 1 -t 64 -v 300001 --softcap 30 --z-loss 0.0001 --ignore-every 3
classifier_fused -b 1 -t 100 -v 1 --output none --logit-scale -2 --lse --logits uniform
lm_head
lm_head -b 2 -v 32000 --bias --lse --memory 10% --label-smoothing 0.1 --z-loss 0.0001 --graph
lm_head -b 3 -t 333 -c 129 -v 5003 --bias --memory 2% --softcap 30 --ignore-every 3
lm_head -b 3 -t 333 -c 128 -v 5003 --memory 20% --grad-dtype same --logit-scale -1
lm_head -b 2 -v 32000 --forward --lse --memory 5%
'
# Shapes for compute-sanitizer: small ones; some have long sums that are divided into pieces.
sanitized='
encoder_forward -b 3 -t 17 -c 264 -v 100
encoder_forward -b 8 -t 5 -c 33 -v 100
encoder_backward -b 3 -t 17 -c 264 -v 100 --overwrite
encoder_backward -b 130 -t 5 -c 33 -v 7
embedding_lookup -b 3 -t 17 -c 264 -v 100 --index int64
embedding_lookup -b 3 -t 5 -c 33 -v 100 --bag sum --hotness 0..20 --weights
embedding_lookup -b 1 -t 5 -c 24 -v 100 --bag max --hotness 0..1200 --tables 2
embedding_lookup_backward -b 2 -t 17 -c 24 -v 20 --hotness 0..30 --bag mean --weights --dweights
embedding_lookup_backward -b 1 -t 50 -c 33 -v 5 --bag max --sparse
embedding_update -b 3 -t 17 -c 264 -v 20
embedding_update -b 3 -t 17 -c 33 -v 20 --op accumulate
embedding_update -b 3 -t 17 -c 264 -v 100 --op rowwise-adam --weight-decay 0.1
classifier_fused -b 3 -t 17 -v 1003 -p 1005 --probs --accuracy --label-smoothing 0.1 --ignore-every 4
'
# The same for kernels with bulk copies, which only memcheck and synccheck check: racecheck reports races where
# mbarriers signal the end of bulk copies, even in the simplest ring, and initcheck does not see the writes of tensor
# copies, also in cuBLASLt's kernels.
bulk='
classifier_fused -b 1 -t 4 -v 40965 --label-smoothing 0.1 --output other --block-size 256
classifier_fused -b 1 -t 4 -v 40965 --output none --block-size 256
classifier_fused -b 1 -t 3 -v 53001 --block-size 256
lm_head -b 3 -t 17 -c 40 -v 1003 --bias --memory 0.1 --label-smoothing 0.1 --ignore-every 4
lm_head -b 1 -t 5 -c 33 -v 1003 --memory 1 --grad-dtype same --softcap 30
'
each() {  # KERNEL LIST: the list's lines of that kernel, with --dtype of each type; fp32 has no stochastic rounding
    for dtype in fp32 fp16 bf16; do
        sed -En "s/^$1( .*)?$/& --dtype $dtype/p" <<< "$2" | sed '/stochastic.*fp32$/d'
    done
}
quietly() {  # COMMAND...: if it fails, prints its output and ends the shell
    log=$("$@" 2>&1) || { echo "$log"; exit 1; }
}
export -f quietly
mkdir -p "$dir"
for kernel in ${KERNELS:-encoder_forward encoder_backward embedding_lookup embedding_lookup_backward embedding_update classifier_fused lm_head}; do
    each $kernel "$checks" | while read -r _ options; do quietly ./$kernel all --check $options; done
    if [ -n "${SANITIZERS:-}" ]; then
        for tool in memcheck synccheck racecheck initcheck; do
            case $tool in memcheck | synccheck) looked_at="$sanitized$bulk" ;; *) looked_at=$sanitized ;; esac
            each $kernel "$looked_at" | while read -r _ options; do
                echo "--tool $tool --error-exitcode 9 ./$kernel all --check $options"
            done
        done | xargs -P 8 -I {} bash -c 'quietly compute-sanitizer {}'
        echo "$kernel: compute-sanitizer reports nothing"
    fi
    grep -E "^$kernel( |$)" <<< "$shapes" | while read -r _ options; do
        echo "$kernel $options"
        if [ $kernel = lm_head ]; then options="$options --repeat 10"; fi  # 40 ms per run, for 6 versions and the GEMMs
        ./$kernel all --bench $options --json "$work/$kernel.jsonl" | sed -n '/^version/,$p'
    done
    if [ $kernel = lm_head ]; then ./lm_head --bench --sweep memory > "$work/sweep.txt" && mv "$work/sweep.txt" "$dir"/; fi
    scripts/tables.py --stamp "$work/$kernel.jsonl"
    mv "$work/$kernel.jsonl" "$dir"/
done
./encoder_forward > "$work/run.txt"
mv "$work/run.txt" "$dir"/
