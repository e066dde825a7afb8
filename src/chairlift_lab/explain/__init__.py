"""The visual guide: pictures of how serving works, each drawn from a real run of this engine.

data  = topic.run(engines)      a run of the engine, as plain values
sheet = topic.draw(data)        a drawing of them, which counts what it draws
text  = topic.filled(data)      the words around the pictures, with the run's own figures in them
"""
