"""Robots: one file each, found by its file name. `load_robot("aloha")`; docs/add_a_robot.md adds one."""

from pi05.robots.base import Dim, Robot, load_robot, robot_names

__all__ = ["Dim", "Robot", "load_robot", "robot_names"]
