"""Decentralized, semi-decentralized and one-shot federated learning as Ray-distributed sweeps."""
