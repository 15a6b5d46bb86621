#!/bin/sh
# TaskProlog= in slurm.conf: Slurm runs it as the user before each task and adds what it prints to the environment.
# Jobs then publish where `tierd --all-users` looks, also if job_container/tmpfs gives each job a /tmp of its own; leave
# /var/tmp out of its Dirs=. An engine creates the directory with mode 0700.
echo "export TIERING_RUN_DIR=/var/tmp/tiering-$(id -u)"
