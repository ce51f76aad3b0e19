"""python -m attn_flow: the command line, which torchrun can start."""

from attn_flow.cli.main import main

main()
