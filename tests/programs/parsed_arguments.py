"""A classifier, trained by the Trainer of transformers, with arguments from the command line."""

import torch
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        tokens = torch.full((256,), 7)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": index % 2}


def main():
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    config = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    Trainer(BertForSequenceClassification(config), arguments, train_dataset=Rows()).train()


if __name__ == "__main__":
    main()
