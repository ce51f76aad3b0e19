"""What test_corpus.py starts in other processes: a corpus is recorded, slowly. The one argument is JSON."""

import json
import sys
import time

import torch
from encoder_zoo import tiny, tokenizer

from attn_flow.base.processes import leave, processes
from attn_flow.hooks import corpus, record_corpus

arguments = json.loads(sys.argv[1])
torch.set_num_threads(arguments["threads"])  # bits are promised for as many threads
plain, recorded = corpus.record_batch, 0


def slow_down(*batch: object) -> object:
    """Wait before the third batch."""
    global recorded
    recorded += 1
    time.sleep(arguments["pause"] if recorded > 2 else 0.0)
    return plain(*batch)


corpus.record_batch = slow_down
options = {"points": ["resid", "blocks.1.attn.hook_out"], "batch": 4, "world": processes()}
files = record_corpus(tiny("BERT"), tokenizer(), arguments["texts"], arguments["folder"], **options)
sys.stdout.write(f"recorded {recorded} of {len(files)} files\n")  # in one piece: two processes write to one pipe
sys.stdout.flush()
leave()  # as the command line does: threads that still communicate when Python ends may abort the process
