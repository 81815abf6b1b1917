"""What servers compute from clients' statistics or networks: pure functions, no communication."""
