"""Computes. torch, torch.distributed and transformers; knows no ray."""
