"""A script in the style of Stoke's printed example; it is parsed, never run."""

import torch
from stoke import ClipGradNormConfig, DDPConfig, Stoke, StokeOptimizer
from torchvision.models import resnet18

model = resnet18(num_classes=10)
optimizer = StokeOptimizer(optimizer=torch.optim.SGD, optimizer_kwargs={"lr": 0.1, "momentum": 0.9})
stoke = Stoke(
    model=model,
    optimizer=optimizer,
    loss=torch.nn.CrossEntropyLoss(label_smoothing=0.1),
    batch_size_per_device=96,
    gpu=True,
    fp16="amp",
    distributed="ddp",
    grad_accum_steps=4,
    grad_clip=ClipGradNormConfig(max_norm=5.0, norm_type=2.0),
    configs=[DDPConfig(local_rank=0, convert_to_sync_batch_norm=True)],
)
loader = stoke.DataLoader(dataset=None, num_workers=4, pin_memory=True)
