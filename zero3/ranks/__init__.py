"""Communication between ranks: joining, collectives, heartbeats, deadlocks, and agreement."""
