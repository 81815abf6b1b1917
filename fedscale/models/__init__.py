"""Frozen backbones, and how prompts enter them."""
