"""The command line: reads options, builds a configuration, starts an engine or a server.

    main.py       tokens to a command; errors to one line and an exit code
    flags.py      flags made from the fields of EngineConfig; the sampling flags
    settings.py   defaults, then config file, then HEADRACE_* variables, then flags
    aliases.py    other engines' names for our flags
    session.py    a model opened for questions, with the figures of each answer
    <command>.py  one file per command

Nothing here imports torch before a command needs the engine, so that --help is instant.
"""
