"""What test_corpus.py starts in other processes: statistics of texts, slowly. The one argument is JSON."""

import json
import sys
import time
from collections.abc import Iterator

import torch
from encoder_zoo import tiny, tokenizer

from attn_flow.hooks import record_corpus

given = json.loads(sys.argv[1])
torch.set_num_threads(given["threads"])


def slowly() -> Iterator[str]:
    for text in given["texts"]:
        time.sleep(given["pause"])
        yield text


options = {**given["options"], "reservoir": 40, "every": 0, "states": given["states"]}
found = record_corpus(tiny("BERT"), tokenizer(), slowly(), given["folder"], **options)
sys.stdout.write(f"n {found.n}\n")  # in one piece: two processes write to one pipe
