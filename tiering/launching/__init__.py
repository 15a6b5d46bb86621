"""Starting ranks as the command ``deepspeed`` does: nodes and slots, command lines, processes on other nodes.

nodes.py      hostfiles, filters, the nodes and slots of a job
program.py    the script that each rank runs
lines.py      the command lines of torchrun, srun and mpirun
over_ssh.py   starts one command per node, and passes signals and exit codes on
"""
