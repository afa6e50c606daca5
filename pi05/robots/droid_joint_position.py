"""DROID with joint targets in place of velocities: joints relative to the state, the gripper absolute (openpi's JOINT_POSITION recipes)."""

from pi05.robots import droid

ROBOT = droid.ROBOT.replace(name="droid_joint_position", actions=droid.STATE, delta_kinds=("joint",))
