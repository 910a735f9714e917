#!/bin/sh
# How the models under models/ are made, on one H200: `tools/train/reproduce.sh STAGE...` runs stages one behind the
# other. Each ends by its time limit, and goes on where it was when it is run again with more time; where there is more
# text than before, remove the stage's folder in WORK/states first. The first command that fails ends everything.
#
#   TEXT     folder with books.txt.xz, peps.txt.xz and gsm8k_train.txt.xz
#   SMOLLM2  the GGUF file of SmolLM2-135M-Instruct (python -m tools.fetch_model smollm2)
#   PROMPTS  JSON lines with HumanEval, GSM8K and Spec-Bench prompts, for `evaluate`
#   WORK     folder for everything that is made (default build/train)
#   OUT      if set, gets what a stage has made, but no states, as one tar file in pieces of PIECE bytes (default 15 MB):
#            `cat OUT/results.tar.* | tar x -C WORK` puts it back
#   PYTHON   default python3
set -eu

WORK=${WORK:-build/train}
OUT=${OUT:-}
PYTHON=${PYTHON:-python3}
train() { "$PYTHON" -m tools.train "$@"; }
smollm2_tokenizer() { [ -z "${SMOLLM2_TOKENIZER:-}" ] || echo --tokenizer "$SMOLLM2_TOKENIZER"; }

made=
keep() {  # what is in $OUT is whole, whenever the machine is taken away
    [ -n "$OUT" ] || return 0
    made="$made $*"
    mkdir -p "$OUT/.new"
    # shellcheck disable=SC2086
    tar c -C "$WORK" $made | split -b "${PIECE:-15000000}" -d - "$OUT/.new/results.tar."
    rm -f "$OUT"/results.tar.*
    mv "$OUT"/.new/* "$OUT/"
    rmdir "$OUT/.new"
}

tokenizer() {  # needs no GPU
    train tokenizer --text "$TEXT/books.txt.xz" "$TEXT/peps.txt.xz" "$TEXT/gsm8k_train.txt.xz" \
        --output "$WORK/tokenizer"
    keep tokenizer
}

text() {  # another SEED adds to what is there
    # shellcheck disable=SC2046
    train sample --model "$SMOLLM2" $(smollm2_tokenizer) --output "$WORK/text" --time-limit "${TEXT_SECONDS:-300}" \
        --workers "${WORKERS:-4}" --num-seqs 256 --kv-cache-gib 8 --kinds text --greedy-share 0.25 \
        --seed "${SEED:-0}" --sums "$TEXT/gsm8k_train.txt.xz" --passages "$TEXT/books.txt.xz" "$TEXT/peps.txt.xz"
    keep text
}

# More text for a head, of all kinds of prompts: what SmolLM2 asks itself, long texts with questions, German.
broad_text() {
    # shellcheck disable=SC2046
    train ask --model "$SMOLLM2" $(smollm2_tokenizer) --output "$WORK/asked" --time-limit "${ASK_SECONDS:-22}" \
        --workers "${WORKERS:-4}" --num-seqs 256 --kv-cache-gib 8 --seed "${SEED:-0}"
    # shellcheck disable=SC2046
    train sample --model "$SMOLLM2" $(smollm2_tokenizer) --output "$WORK/broad-text" \
        --time-limit "${BROAD_SECONDS:-92}" --workers "${WORKERS:-4}" --num-seqs 256 --kv-cache-gib 8 --kinds broad \
        --greedy-share 0.5 --max-model-len 1536 --max-tokens 96 160 256 448 --seed "${SEED:-0}" --asked "$WORK/asked" \
        --sums "$TEXT/gsm8k_train.txt.xz" --passages "$TEXT/books.txt.xz" "$TEXT/peps.txt.xz"
    keep asked broad-text
}

target() {
    train target --text "$TEXT/books.txt.xz" "$TEXT/peps.txt.xz" "$TEXT/gsm8k_train.txt.xz" --samples "$WORK/text" \
        --tokenizer "${TOKENIZER:-$WORK/tokenizer}" --output "$WORK/tiny-gemma4" --state "$WORK/states/target" \
        --time-limit "${TARGET_SECONDS:-170}"
    keep tiny-gemma4
}

own_text() {
    train sample --model "$WORK/tiny-gemma4" --output "$WORK/own-text" --time-limit "${OWN_TEXT_SECONDS:-60}" \
        --workers "${WORKERS:-4}" --num-seqs 256 --kv-cache-gib 4 --kinds chat --greedy-share 0.5
    keep own-text
}

assistant() {  # both policies of where a draft stands
    for positions in ${POLICIES:-last_key last_token}; do
        train assistant --target "$WORK/tiny-gemma4" --samples "$WORK/own-text" --positions "$positions" \
            --output "$WORK/assistant-$positions" --state "$WORK/states/assistant-$positions" \
            --time-limit "${ASSISTANT_SECONDS:-90}"
        keep "assistant-$positions"
    done
}

eagle() {
    train eagle --target "$SMOLLM2" --samples "$WORK/text" --output "$WORK/smollm2-eagle3" \
        --state "$WORK/states/eagle" --time-limit "${EAGLE_SECONDS:-230}"
    keep smollm2-eagle3
}

broad_eagle() {  # begins with the head of `eagle`
    train eagle --target "$SMOLLM2" --samples "$WORK/broad-text" "$WORK/text" --init "$WORK/smollm2-eagle3" \
        --share-target-head --draft-vocab-size 16384 --rows 16 --row-length 1280 --draft-steps 4 \
        --learning-rate 0.0015 --table-learning-rate 0.0003 --time-limit "${BROAD_EAGLE_SECONDS:-200}" \
        --output "$WORK/smollm2-eagle3-broad" --state "$WORK/states/broad-eagle"
    keep smollm2-eagle3-broad
}

evaluate() {
    mkdir -p "$WORK/figures"
    for positions in ${POLICIES:-last_key last_token}; do
        train evaluate --target "$WORK/tiny-gemma4" --held-out --k 4 --max-model-len 1024 --batch-sizes 1 8 64 \
            --speculator "gemma4_mtp,model=$WORK/assistant-$positions,positions=$positions" \
            --output "$WORK/figures/tiny-gemma4-$positions.json"
    done
    evaluate_eagle
}

evaluate_eagle() {
    mkdir -p "$WORK/figures"
    # shellcheck disable=SC2046
    train evaluate --target "$SMOLLM2" $(smollm2_tokenizer) --prompts "$PROMPTS" --k 4 --max-model-len 2048 \
        --speculator "eagle3,model=$WORK/smollm2-eagle3" --batch-sizes 1 8 64 --num-prompts 40 \
        --output "$WORK/figures/smollm2-eagle3.json"
    keep figures
}

# Tokens per second, off and on, of what is under models/, which is all that it needs, and SMOLLM2 for its head.
speed() {
    mkdir -p "$WORK/figures"
    train evaluate --target models/tiny-gemma4 --held-out --num-prompts 64 --num-seqs 64 --k 4 --max-model-len 512 \
        --speculator gemma4_mtp,model=models/tiny-gemma4-assistant,positions=last_token \
        --batch-sizes 1 8 64 --output "$WORK/figures/tiny-gemma4-speed.json"
    # shellcheck disable=SC2046
    [ -z "${SMOLLM2:-}" ] || train evaluate --target "$SMOLLM2" $(smollm2_tokenizer) --held-out --num-prompts 64 \
        --num-seqs 64 --k 4 --max-model-len 512 --speculator eagle3,model=models/smollm2-eagle3 \
        --batch-sizes 1 8 64 --output "$WORK/figures/smollm2-eagle3-speed.json"
    keep figures
}

# Every training stage for seconds, on the text that is there: does it run here at all? In a shell of its own, which ends
# at the first failure: in a function that is part of a condition, nothing would.
smoke() {
    rm -rf "$WORK/smoke" && mkdir -p "$WORK/smoke"
    ln -s ../text "$WORK/smoke/text"
    TOKENIZER=${TOKENIZER:-$WORK/tokenizer} WORK="$WORK/smoke" OUT='' POLICIES=last_key WORKERS=1 \
        TARGET_SECONDS=6 OWN_TEXT_SECONDS=4 ASSISTANT_SECONDS=5 EAGLE_SECONDS=8 \
        sh "$0" target own_text assistant eagle
}

# Sampling leaves room on the device: use it to try what comes next. If either fails, so does this, at once.
text_and_smoke() {
    OUT='' setsid sh "$0" text &
    sampling=$!
    trap 'kill -- -$sampling 2>/dev/null || true' EXIT
    while ! ls "$WORK"/text/*.jsonl.gz >/dev/null 2>&1; do
        kill -0 $sampling 2>/dev/null || wait $sampling
        sleep 1
    done
    smoke
    wait $sampling
    trap - EXIT
    keep text
}

mkdir -p "$WORK"
for stage in "$@"; do
    echo "== $stage, $(date +%T)"
    "$stage"
done
