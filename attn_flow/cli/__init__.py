"""The command line `attn-flow`: one function a command, in a module that is named after what it is about."""
