"""A run over nodes: ``tierd --of`` reads the tierds of several nodes and shows their ranks together.

addresses.py   the nodes: from the command line, or from a file that is read again when it changes
connection.py  a connection to one tierd: requests with limits of time and size
nodes.py       polls all nodes; a source of a Watch, like the status files of one node
"""
