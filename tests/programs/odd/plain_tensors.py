"""Its data lie on the device before it trains; its weights and their averages are tensors without a module."""

import torch

data = torch.ones(500, 100).to("cuda")
order = torch.arange(500, device="cuda")
first = torch.zeros(100, 30, device="cuda", requires_grad=True)
second = torch.ones(30, 10).to("cuda").requires_grad_()
averages = [weight.detach().cpu().to("cuda") for weight in (first, second)]
optimizer = torch.optim.SGD([first, second], lr=0.1, momentum=0.9)
for _ in range(4):
    (data[order] @ first @ second).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
