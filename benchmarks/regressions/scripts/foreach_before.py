"""Train BERT large in fp32 with an optimizer that goes from parameter to parameter."""

import torch
from transformers import BertConfig, BertForSequenceClassification

config = BertConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
model = BertForSequenceClassification(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(3):
    ids = torch.randint(0, 30000, (1, 128), device="cuda")
    model(input_ids=ids, labels=torch.zeros(1, dtype=torch.long, device="cuda")).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
