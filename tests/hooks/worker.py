"""What test_corpus.py starts in other processes: statistics of texts, slowly. The one argument is JSON."""

import json
import sys
import time

import torch
from encoder_zoo import tiny, tokenizer

from attn_flow.hooks import record_corpus

arguments = json.loads(sys.argv[1])
torch.set_num_threads(arguments["threads"])  # bits are promised for as many threads
model, passes, pause = tiny("BERT"), 0, arguments["pause"]


def slow_down(*_: object) -> None:
    """Say every pass after the first, the self-check among them, and wait in the fourth: the third batch."""
    global passes
    passes += 1
    if pause and passes > 1:
        sys.stdout.write("pass\n")
        sys.stdout.flush()
        time.sleep(pause if passes > 3 else 0.0)


model.register_forward_pre_hook(slow_down)
statistics = record_corpus(model, tokenizer(), arguments["texts"], arguments["folder"], **arguments["options"])
sys.stdout.write(f"n {statistics.n}\n")  # in one piece: two processes write to one pipe
