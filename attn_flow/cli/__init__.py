"""What a person types: the commands of attn-flow."""
