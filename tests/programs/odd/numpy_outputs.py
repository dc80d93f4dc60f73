"""Its outputs become arrays, lists and numbers."""

import numpy as np
import torch
from one_layer import device, model, step

step()
with torch.no_grad():
    outputs = model(torch.randn(6, 8, device=device))
array = outputs.cpu().numpy()
assert array.shape == (6, 2) and array.dtype == np.float32
assert np.concatenate([array, outputs.detach().cpu().float().numpy()]).shape == (12, 2)
assert len(outputs.argmax(dim=-1).tolist()) == 6
assert len(outputs.softmax(dim=-1)[0].cpu().tolist()) == 2
print(float(outputs.mean()), int(outputs.argmax()), f"{outputs.max():.2f}", outputs)
step()
