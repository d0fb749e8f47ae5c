"""K-FAC on many processes, by `torch.distributed`. One process needs nothing of it: no file outside imports it.

base                        what is sent together: layouts, what a rank gives, what an owner gets
comm                        collectives in one fixed order, launched as their members become ready
launch                      which launcher started the processes, and their process group
"""
