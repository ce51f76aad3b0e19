"""What test_companions.py starts under torchrun: one update of a replaced BERT. Arguments: kind, file of the state."""

import sys

import torch
import torch.distributed as dist
from encoder_zoo import inputs, output, tiny

from attn_flow.hooks import flows, replace_attention

kind, folder = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, count = dist.get_rank(), dist.get_world_size()
model = replace_attention(tiny("BERT"), [0, 2], steps=2, step="rk4", beta_factor=1.3, learn_beta=True)
if kind == "ddp":
    shared = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)  # no loss sees the pooler
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (count,))
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    shared = fully_shard(model, mesh=mesh)
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
mine = {name: t[rank : rank + 1] for name, t in inputs("BERT").items()}
output(shared, mine).sin().mean().backward()
optimiser.step()
whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.state_dict().items()}
if rank == 0:
    assert list(flows(model)) == [0, 2]
    torch.save(whole, folder)
dist.destroy_process_group()
