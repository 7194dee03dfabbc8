"""Virtual cards that live in processes of their own, so that what happens to one happens to no other.

    driver    `ProcessDriver` and `ProcessCard`: what the mesh speaks to
    arena     the memory of one card, which its process and ours share
    frames    messages on a socket, each whole or not at all
    pickling  kernels and arguments as bytes for another interpreter
    life      one process of a card, as its owner sees it
    server    a process that has imported torch, forks the cards off itself and looks after them
    worker    what a card's process runs
    moves, op_kernels  what cards do for each other, and for tensors, as kernels

Bytes go through shared memory and are nobody's message: a write is a copy into the arena. Messages carry kernels,
launches and how they ended. Nothing has a name in the file system, so nothing can be left behind there.
"""
