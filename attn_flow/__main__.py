"""python -m attn_flow: the command line, and what torchrun starts."""

from attn_flow.cli.entry import app

app(prog_name="attn-flow")
