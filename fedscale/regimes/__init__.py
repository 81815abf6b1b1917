"""Regimes: who trains and who mixes with whom, as a stream of Steps."""
