/* Named points at which a test can kill or stop the process.
 *
 * In a build with SHMBUS_FAILPOINTS=1 (setup.py), the environment variable SHMBUS_FAILPOINT holds
 * NAME:HIT:kill or NAME:HIT:stop. On pass HIT through point NAME, counted from 1, the process sends
 * itself SIGKILL or SIGSTOP. any:HIT:delay delays each HIT-th pass through the points. The first
 * point passed reads the variable. Other builds compile points to nothing. */
#pragma once

#ifdef SHMBUS_FAILPOINTS
void failpoint_passed(const char *name);
#define FAILPOINT(name) failpoint_passed(name)
#else
#define FAILPOINT(name) ((void)0)
#endif
