package holdfast.quartz;

import holdfast.Hold;
import holdfast.Holdfast;
import holdfast.HoldfastException;
import holdfast.LockSpec;
import java.time.Duration;
import java.util.Map;
import java.util.Objects;
import java.util.Optional;
import java.util.concurrent.ConcurrentHashMap;
import org.quartz.JobExecutionContext;
import org.quartz.JobListener;
import org.quartz.SchedulerException;
import org.quartz.Trigger;
import org.quartz.Trigger.CompletedExecutionInstruction;
import org.quartz.listeners.JobListenerSupport;
import org.quartz.listeners.TriggerListenerSupport;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Runs each fire time of a trigger on one node of a fleet whose schedulers have the same jobs and share no job store. On all nodes, the trigger must have the
 * same identity, since one without gets a random name, and the same fire times: by a cron expression or the same start, and with a misfire instruction that
 * ignores misfires. {@code triggerJob} runs the job once, on the node that calls it. If the server can't be reached, the job does not run.
 *
 * <p>A job whose class has {@code @DisallowConcurrentExecution} runs on one node at a time. Fire times during a run are run after it by the same node; they are
 * lost if that node is killed, and some may be if the nodes' clocks differ.
 *
 * <p>Add it with {@code scheduler.getListenerManager().addTriggerListener(listener)}. A job may read its fence, a {@code Long}, by
 * {@code context.get(FleetTriggerListener.FENCE)}.
 */
public final class FleetTriggerListener extends TriggerListenerSupport {
    /** The key of the fencing token in the job's context. */
    public static final String FENCE = "holdfast.fence";
    private static final Logger LOG = LoggerFactory.getLogger(FleetTriggerListener.class);

    /**
     * An execution of a job on this node, and its locks.
     *
     * @param thread executes the job, and no other until this execution has ended
     */
    private record Run(String job, Thread thread, Hold fire, Optional<Hold> exclusive) {
        boolean isHeld() {
            return fire.isHeld() && exclusive.map(Hold::isHeld).orElse(true);
        }
    }

    private final Holdfast client;
    private final String prefix;
    private final Duration keep;
    private final Map<String, Run> runs = new ConcurrentHashMap<>();
    /** Ends executions that another trigger listener vetoes: Quartz does not report their completion. */
    private final JobListener vetoed = new JobListenerSupport() {
        @Override
        public String getName() {
            return FleetTriggerListener.this.getName();
        }

        @Override
        public void jobExecutionVetoed(JobExecutionContext context) {
            end(context.getFireInstanceId());
        }
    };

    /** Makes a listener whose locks have the names {@code quartz:…}. It holds the lock of a fire time until a minute after the run, for nodes whose clocks are late. */
    public FleetTriggerListener(Holdfast client) {
        this(client, "quartz:", Duration.ofMinutes(1));
    }

    /**
     * Makes a listener whose locks have names that begin with this prefix.
     *
     * @param keep for how long the lock of a fire time is held after the run: longer than the clocks of the nodes differ; at least 1 ms
     */
    public FleetTriggerListener(Holdfast client, String prefix, Duration keep) {
        this.client = Objects.requireNonNull(client, "client");
        this.prefix = Objects.requireNonNull(prefix, "prefix");
        this.keep = LockSpec.builder("any").lease(keep).build().lease();
    }

    @Override
    public String getName() {
        return "holdfast";
    }

    @Override
    public boolean vetoJobExecution(Trigger trigger, JobExecutionContext context) {
        String instance = context.getFireInstanceId();
        // Quartz did not report the end of an earlier execution by this thread if a job listener threw.
        runs.forEach((id, run) -> {
            if (run.thread == Thread.currentThread() && !id.equals(instance)) {
                end(id);
            }
        });
        Run again = runs.get(instance);
        if (again != null) {
            // The job requested to be executed again immediately.
            boolean isHeld = again.isHeld();
            if (!isHeld) {
                end(instance);
            }
            return !isHeld;
        }
        String job = prefix + context.getJobDetail().getKey();
        Optional<Hold> exclusive = Optional.empty();
        try {
            context.getScheduler().getListenerManager().addJobListener(vetoed);
            // The job's own lock first: the node that runs the job must find the lock of this fire time free after its run.
            if (context.getJobDetail().isConcurrentExecutionDisallowed()) {
                exclusive = client.lock(job).tryAcquire();
                if (exclusive.isEmpty()) {
                    return true;
                }
            }
            Optional<Hold> fire = client.lock(job + "@" + trigger.getKey() + "@" + context.getScheduledFireTime().getTime()).tryAcquire();
            if (fire.isEmpty()) {
                exclusive.ifPresent(Hold::close);
                return true;
            }
            context.put(FENCE, exclusive.orElse(fire.get()).fence());
            runs.put(instance, new Run(job, Thread.currentThread(), fire.get(), exclusive));
            return false;
        } catch (RuntimeException | SchedulerException why) {
            // If this threw, as it would after the client was closed, Quartz would never end the execution.
            LOG.error("job '{}' does not run: its lock could not be acquired", job, why);
            exclusive.ifPresent(Hold::releaseAsync);
            return true;
        }
    }

    @Override
    public void triggerComplete(Trigger trigger, JobExecutionContext context, CompletedExecutionInstruction instruction) {
        if (instruction != CompletedExecutionInstruction.RE_EXECUTE_JOB) {
            end(context.getFireInstanceId());
        }
    }

    private void end(String instance) {
        Run run = runs.remove(instance);
        if (run == null) {
            return;
        }
        try {
            run.exclusive.ifPresent(Hold::close);
        } catch (HoldfastException why) {
            LOG.warn("job '{}' may not have been exclusive to its end", run.job, why);
        }
        try {
            run.fire.releaseAfter(keep);
        } catch (HoldfastException | IllegalStateException why) {
            // IllegalStateException: the client was closed meanwhile. If this threw, Quartz would never end the execution.
            LOG.warn("the lock of a fire time of job '{}' may not have been held to the end", run.job, why);
        }
    }
}
