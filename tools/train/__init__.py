"""Trains small models for speculation: a Gemma 4 target, its MTP assistant, an EAGLE-3 head; see docs/training.md."""
