#!/usr/bin/env bash
# What one GPU says, in one folder and under 8 minutes:   bash tests/gpu_report.sh FOLDER TEXT_FILE
# The CUDA tests, the step timings of gpt2 and baby, then baby trained on the text with all four norms, as far as time allows.
# DEVICE=cpu runs the same at toy sizes, to see that the script works.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: gpu_report.sh FOLDER TEXT_FILE}
text=${2:?usage: gpu_report.sh FOLDER TEXT_FILE}
mkdir -p "$folder"
begin=$SECONDS
left() { local s=$((460 - SECONDS + begin)); echo $((s > 1 ? s : 1)); }     # `timeout 0` would mean no limit
gpt2="--preset gpt2 --norm pre geo" baby="--preset baby" train="--preset baby" device=cuda
if [[ ${DEVICE:-cuda} == cpu ]]; then
    device=cpu
    toy="--n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --batch_size 4"
    gpt2+=" $toy" baby+=" $toy" train+=" $toy --max_iters 20 --eval_iters 2"
fi
run() {     # run NAME COMMAND...: keep what it prints, and say how it ended
    local name=$1; shift
    timeout "$(left)" "$@" >"$folder/$name.txt" 2>&1
    echo "$name: exit $?, $((SECONDS - begin)) s since the start" | tee -a "$folder/summary.txt"
}
rm -f "$folder/summary.txt"
[[ $device == cpu ]] || run machine nvidia-smi
run tests python -m pytest -q tests/test_cuda.py
run step-gpt2 python tests/bench.py step --device $device $gpt2 --rounds 10 --json "$folder/step-gpt2.json"
run step-baby python tests/bench.py step --device $device $baby --rounds 10 --json "$folder/step-baby.json"
run prepare python data/prepare.py "$text" --name gpu_report
run baby python train.py --device $device $train --dataset gpu_report --norm pre post peri geo --out_dir "$folder/baby"
cat "$folder/summary.txt"
