"""What clients do between two exchanges: train their payload on their own data."""
