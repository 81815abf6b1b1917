"""Datasets held as uint8 arrays, and how they are split over clients."""
