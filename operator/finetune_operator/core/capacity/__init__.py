"""Where the attempts of a stage run: spot or on-demand nodes, and of which class.

`nodes` are the node classes of a stage, `experience` holds the measurements of its attempts, `policy` decides between
spot and on-demand nodes, `choice` applies the policy to the next attempt, and `message` explains the choice with
its numbers.
"""
