"""The parts of bench_server.py: stand_in.py is the engine over stand-ins for drives, the others are its cases."""
